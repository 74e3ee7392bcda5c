"""Dull twins: plain Python that does slowly what the kernels and codecs do fast."""
