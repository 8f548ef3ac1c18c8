import sys

from service.app import main

sys.exit(main())
