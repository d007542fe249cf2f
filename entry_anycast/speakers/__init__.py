"""What speaks BGP for us, ExaBGP or BIRD, behind one interface, and the watchdog over it."""
