"""Print a difference at once, in place of the tiny training of an untested release."""

import json
import sys

if __name__ == "__main__":
    sys.stdout.write(json.dumps(["master of sub-group 0: 1 of 4 values differ"]) + "\n")
