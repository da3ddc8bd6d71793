"""Several gateway processes behind one port, and one that takes another's place.

The parent has the listening sockets and the admin port, and no request of a client's. `worker` is a process
that has requests and a channel to its parent, `crew` keeps the workers running, `figures` puts together what
they tell. Whoever waits in a socket's queue stays there when a worker ends: the socket is the parent's.
"""

PLACE = "DUALGAUGE_WORKER"
"""The environment variable by which a process knows that it is a worker, and where."""


class StartError(Exception):
    """A worker did not come to serve; the message says why."""
