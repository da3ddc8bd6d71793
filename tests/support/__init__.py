"""What the gateway's tests share: an engine that breaks on demand, a client, a gateway on real sockets."""
