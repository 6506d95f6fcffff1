"""Providers, devices, kernels, dispatch, ledger; knows no op."""
