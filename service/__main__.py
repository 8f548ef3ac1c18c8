import sys

from .command import serve_command as main

if __name__ == "__main__":
    sys.exit(main())
