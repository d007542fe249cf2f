"""Where a request goes in the region: admission -> queue -> policy -> pick. Pure: never does IO."""
