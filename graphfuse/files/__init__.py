"""Formats of files on disk: strict JSON, bytes with a digest, files of caches."""
