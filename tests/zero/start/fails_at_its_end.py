"""Print no difference and fail, in place of the tiny training of an untested release."""

import sys

if __name__ == "__main__":
    print("[]")
    sys.exit(3)
