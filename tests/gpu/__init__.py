"""Which promises hold on a GPU? ``check.py`` runs these tests on a machine that has one."""
