"""Secure aggregation: a server learns the sum of its clients' updates, and no update (Bonawitz et al. 2017)."""
