"""The endpoint picker: a gateway (Envoy) carries the bytes, and this region's machine says where they go.

It speaks the Gateway API Inference Extension's protocol 004, which is Envoy's ext_proc. To the relay a gateway is both:
the client's connection, whose request it brings, and the way upstream, whose answer it brings.
"""
