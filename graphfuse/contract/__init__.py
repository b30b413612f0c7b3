"""Interfaces of patterns and engines, which plug-ins implement, and checks of what they return."""
