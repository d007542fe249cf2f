"""Which replicas are fit for work: probes, standing, outliers among peers, and who fails so fast that he looks idle.

Never sends a request elsewhere and never chooses.
"""
