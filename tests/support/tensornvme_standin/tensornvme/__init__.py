"""Stands in for TensorNVMe, which takes CUDA to build: put this folder's parent on sys.path."""
