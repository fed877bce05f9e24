"""The node daemon: owns the sandboxes of one machine, as an API server and a kubelet do on a cluster."""
