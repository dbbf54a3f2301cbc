from trainer.certify.case import *
