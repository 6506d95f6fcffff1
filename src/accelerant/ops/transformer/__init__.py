"""The passes of a transformer block with what is saved, cast and summed under control: nn's layers call them."""
