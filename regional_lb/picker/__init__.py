"""The endpoint picker: a gateway (Envoy) carries the bytes, and this region's machine chooses the replica.

Implements protocol 004 of the Gateway API Inference Extension, which is Envoy's ext_proc. To the relay a gateway is
both sides: the client's connection, whose request it brings, and the upstream connection, whose answer it brings.
"""
