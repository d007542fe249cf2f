"""The BGP speakers that announce for us, ExaBGP or BIRD, behind one interface, and the watchdog over them."""
