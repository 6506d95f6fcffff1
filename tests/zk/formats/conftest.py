"""Its presence puts this folder on the path of imports, for parts.py."""
