"""What FlashInfer's wrappers and functions share: arguments, batches, tables, masks, results."""
