"""What is known of the replicas. Pure: it is told, and answers; never does IO."""
