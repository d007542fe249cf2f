"""The admin port: what operators see, and what they may do. Never on the data path."""
