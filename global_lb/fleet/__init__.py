"""What is known of the regions. Pure: never does IO."""
