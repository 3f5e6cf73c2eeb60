"""Certificates of the cluster's processes: identities, files, TLS contexts that follow them, a small authority."""
