"""Exact arithmetic that privacy and zero-knowledge share; `accelerant.zk` has its public names."""
