"""An emulated WAN: paths between regions cross links with delay, jitter, cuts and freezes. Needs no root."""
