"""Comparisons with other libraries, run from a checkout; the installed package does not contain them."""
