"""The peers: one file a library, one `Peer` in it for each bench that it takes part in."""
