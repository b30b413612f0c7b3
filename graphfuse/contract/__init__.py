"""What patterns and engines are: the interfaces that plug-ins implement, and the checks of what they answer."""
