"""What is known of the replicas. Pure: it takes events and answers queries; never does IO."""
