"""The entry by DNS: an authoritative server whose answers lead clients to the best entry that the law allows them."""
