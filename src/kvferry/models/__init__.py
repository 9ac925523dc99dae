"""The built-in model, the catalogue of built-in names, and a maker of random models."""
