"""Prefix chains, the trie of which location caches which prefix, and the journal of its changes. Never does IO."""
