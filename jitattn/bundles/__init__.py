"""Precompiled kernel bundles: contents per model, compilation, wheels."""
