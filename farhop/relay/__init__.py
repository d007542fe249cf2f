"""The HTTP data plane: client side, upstream side, streaming. Never decides where a request goes."""
