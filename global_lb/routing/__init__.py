"""Where a request goes: law -> policy -> pick, and what follows when a region fails. Pure: never does IO."""
