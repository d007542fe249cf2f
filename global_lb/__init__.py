"""The global tier: picks the region. view -> law -> policy -> pick."""
