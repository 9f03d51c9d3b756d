"""Multi-head latent attention over paged latent caches."""
