"""Reference models: slow, plain Python versions of what the kernels and codecs compute fast."""
