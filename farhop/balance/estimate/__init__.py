"""What is measured and learned, and what a request would cost by it. Never does IO, never reads a clock."""
