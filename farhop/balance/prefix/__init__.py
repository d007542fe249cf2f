"""Prefix chains and who holds them: the trie, its mirrors and the journal of their changes. Never does IO."""
