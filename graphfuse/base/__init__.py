"""What every room stands on: errors, data types, enumerations, device facts, settings. Nothing here knows graphs."""
