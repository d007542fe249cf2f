"""The flow-control options of every gRPC connection of a balancer, on either side.

By default gRPC measures a connection's bandwidth with additional pings, to size its window: at one message a second
that doubles the wake-ups of both processes (docs/measurements/performance.md). These options fix the window and switch
the measuring off. Set both or neither: without measuring alone the window is 64 KiB, and 4 MB took 4.2 s over 100 ms
instead of 0.15 s.
"""

WINDOW_BYTES = 4 * 1024 * 1024  # 28 MB a second at 150 ms; the most unread bytes that a peer may send
FIXED_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW_BYTES))
