"""Errors, data types, enumerations, device facts and settings, which every room uses. Nothing here knows graphs."""
