"""FlashInfer's functions that TensorRT-LLM and XQA are behind: one call plans and runs."""
