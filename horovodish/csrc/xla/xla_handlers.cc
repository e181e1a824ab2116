#include "xla/xla_handlers.h"

#include <stdexcept>
#include <string_view>

#include "xla/xla_call.h"

namespace horovodish {

std::vector<std::pair<const char*, xla::Handler*>> xla_handlers(const std::string& platform) {
  if (platform == "cuda") return {{"horovodish_start", &xla_cuda_start}, {"horovodish_done", &xla_cuda_done}};
  return {{"horovodish_run", &xla_run},
          {"horovodish_start", &xla_start},
          {"horovodish_done", &xla_done},
          {"horovodish_rest", &xla_rest},
          {"horovodish_compare", &xla_compare}};
}

void register_xla_handlers(const xla::Api& api, const std::string& platform) {
  if (!speaks_our_interface(api)) throw std::runtime_error("its foreign function interface is of another version");
  for (const auto& [name, handler] : xla_handlers(platform)) {
    const std::string_view text(name);
    xla::HandlerRegisterArgs args{sizeof(args),
                                  nullptr,
                                  {text.data(), text.size()},
                                  {platform.data(), platform.size()},
                                  {nullptr, nullptr, nullptr, handler},
                                  0};
    if (api.handler_register(&args) != nullptr) {
      throw std::runtime_error("it refused horovodish's calls for " + platform);
    }
  }
}

}  // namespace horovodish
