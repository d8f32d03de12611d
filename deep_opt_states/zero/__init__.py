"""How does DeepSpeed ZeRO-3 run an update as a schedule? Only this package depends on DeepSpeed's internals."""
