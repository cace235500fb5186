// What torch_npu needs to be there when it is loaded and no test uses. Whatever computes or answers fails, so that
// nothing is silently wrong; whatever makes, describes or destroys succeeds, since torch_npu's clean-up cannot fail.

#include "device.h"

#define FAILS(name)                                                              \
  extern "C" __attribute__((visibility("default"))) long name() {                \
    return standin::report(standin::kNotSupported, #name " is not modelled");     \
  }
#define SUCCEEDS(name) \
  extern "C" __attribute__((visibility("default"))) long name() { return 0; }

FAILS(aclGetDeviceCapability)
FAILS(aclGetTensorDescDimV2)
FAILS(aclmdlInitDump)
FAILS(aclmdlSetDump)
FAILS(aclopCompileAndExecute)
FAILS(aclopCreateAttr)
FAILS(aclrtDeviceCanAccessPeer)
FAILS(aclrtDeviceEnablePeerAccess)
FAILS(aclrtDeviceGetBareTgid)
FAILS(aclrtGetFunctionAddr)
FAILS(aclrtMallocPhysical)
FAILS(aclrtMapMem)
FAILS(aclrtMemExportToShareableHandle)
FAILS(aclrtMemImportFromShareableHandle)
FAILS(aclrtMemSetPidToShareableHandle)
FAILS(aclrtReserveMemAddress)
FAILS(rtDevBinaryRegister)
FAILS(rtFunctionRegister)
FAILS(rtGetC2cCtrlAddr)
FAILS(rtKernelLaunch)

SUCCEEDS(MsprofGetHashId)
SUCCEEDS(MsprofRegisterCallback)
SUCCEEDS(MsprofReportAdditionalInfo)
SUCCEEDS(MsprofReportApi)
SUCCEEDS(MsprofReportCompactInfo)
SUCCEEDS(MsprofSysCycleTime)
SUCCEEDS(aclAppLog)
SUCCEEDS(aclCreateDataBuffer)
SUCCEEDS(aclCreateTensorDesc)
SUCCEEDS(aclDestroyDataBuffer)
SUCCEEDS(aclDestroyTensorDesc)
SUCCEEDS(aclGetTensorDescFormat)
SUCCEEDS(aclGetTensorDescNumDims)
SUCCEEDS(aclGetTensorDescType)
SUCCEEDS(aclSetTensorDescName)
SUCCEEDS(aclSetTensorFormat)
SUCCEEDS(aclSetTensorPlaceMent)
SUCCEEDS(aclSetTensorShape)
SUCCEEDS(aclmdlFinalizeDump)
SUCCEEDS(aclopDestroyAttr)
SUCCEEDS(aclopSetAttrBool)
SUCCEEDS(aclopSetAttrDataType)
SUCCEEDS(aclopSetAttrFloat)
SUCCEEDS(aclopSetAttrInt)
SUCCEEDS(aclopSetAttrListBool)
SUCCEEDS(aclopSetAttrListFloat)
SUCCEEDS(aclopSetAttrListInt)
SUCCEEDS(aclopSetAttrListListInt)
SUCCEEDS(aclopSetAttrString)
SUCCEEDS(aclrtFreePhysical)
SUCCEEDS(aclrtProcessReport)
SUCCEEDS(aclrtReleaseMemAddress)
SUCCEEDS(aclrtUnmapMem)
