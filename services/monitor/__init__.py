"""The monitor: hears the workers, judges who is alive, and writes the cluster view."""
