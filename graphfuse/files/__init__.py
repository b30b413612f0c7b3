"""What is written to disk and read back: strict JSON, sealed bytes, files of caches."""
