"""The regional tier: picks the replica. view -> admission -> queue -> policy -> pick."""
