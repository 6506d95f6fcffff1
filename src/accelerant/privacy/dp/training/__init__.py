"""Private training: `make_private`, its optimizer and steps, and `accelerant train --private`."""
