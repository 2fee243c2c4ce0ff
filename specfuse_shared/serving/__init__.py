"""Many answers at once: engine, scheduler, admission, leases, metrics."""
